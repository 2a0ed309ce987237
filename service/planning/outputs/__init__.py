"""The outputs of /encode: one table of them, and the conversion of the engine's arrays to items of a reply."""
