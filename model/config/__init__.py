"""The network as data: layers, stacks, models, and how ranks split them. No torch."""
