"""Dialects: the APIs of other projects, translated to and from the bodies and replies of `service.schemas`.

Each dialect is one module, which translates bodies to a `GenerateBody` or `EncodeBody`, and replies and events of
`service.http.json_replies` to the dialect's. Nothing here knows engines, streams or HTTP. A dialect accepts the fields
that its API defines, refuses by name those that would change the result and are not supported (`Refused`), and ignores
all others, which embeddings, responses and messages refuse. Errors have the shape of `service.core.errors` in every
dialect but Anthropic's.
"""
