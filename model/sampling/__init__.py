"""Sampling of next tokens from logits: penalties, masks, truncation, random sampling, top-k."""
