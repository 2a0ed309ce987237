"""Bodies and replies as strict Pydantic models, from which /docs and /openapi.json are made.

`bodies` has request bodies (unknown fields are refused, values are not converted), `replies` has replies.
"""
