"""What clients type and get back: strict Pydantic models, the source of /docs and /openapi.json.

`bodies` is what is accepted (unknown fields refused, no coercion), `replies` what is answered.
"""
