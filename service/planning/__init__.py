"""Conversion of request bodies to engine requests; a body that cannot be served is refused here."""
