"""Tests of the engine: scheduling, execution, and the asynchronous front."""
