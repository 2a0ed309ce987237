"""JSON schemas as llguidance follows them exactly: rewritten where it reads them otherwise, or refused by place."""
