"""The site of the documentation: its pages are those of the repository, and a reference made from /openapi.json."""
