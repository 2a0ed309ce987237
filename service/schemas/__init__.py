"""Bodies and replies as strict Pydantic models, from which /docs and /openapi.json are made.

`bodies` has the request bodies (unknown fields are refused, values are not coerced), `replies` the replies.
"""
