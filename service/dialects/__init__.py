"""What other projects' clients send and expect, translated to and from the bodies and replies of `service.schemas`.

One module for each dialect: bodies become a `GenerateBody` or an `EncodeBody`, replies and events of
`service.http.json_replies` become the dialect's. Nothing here knows of engines, streams or HTTP; no module of the core
imports from here but `service.routes`. A dialect takes the fields that its API defines, refuses by name those that
would change the result and are not served (`Refused`), and ignores the rest. Errors have the one shape of
`service.core.errors` in every dialect.
"""
