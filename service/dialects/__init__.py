"""Dialects: the APIs of other projects, translated to and from the bodies and replies of `triptych.service.schemas`.

A dialect translates its bodies to a `GenerateBody` or `EncodeBody`, and replies and events of
`triptych.service.http.json_replies` to its own. No dialect knows engines, streams or HTTP. A dialect reads fields of
its API, ignores those that change no output (`Ignored`), and refuses by name those that are not supported (`Refused`)
and unknown ones. Errors have the shape of `triptych.service.core.errors` in every dialect except Anthropic's.
"""
