"""Before a weight is read: what computes a model, in which number formats, and whether it fits the memory."""
