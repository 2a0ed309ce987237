"""Tests of networks, checkpoints, sampling and text."""
