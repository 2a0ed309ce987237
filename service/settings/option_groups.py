"""The groups of settings, in the order in which `triptych serve --help` shows them."""

from __future__ import annotations

SERVICE = "service"
NUMBERS = "device and number formats"
BATCHES = "context, batches and the KV cache"
WEIGHTS = "weights"
SPECULATION = "speculative decoding"
CHAT = "chat"
KEYS = "keys and web pages"
ON_DEMAND = "models loaded on demand"
ADAPTERS = "LoRA adapters"
REPLICAS = "replicas under Ray Serve"
WATCHING = "logs, metrics and traces"
LIMITS = "limits of one request"

ALL = (SERVICE, NUMBERS, BATCHES, WEIGHTS, SPECULATION, CHAT, KEYS, ADAPTERS, ON_DEMAND, REPLICAS, WATCHING, LIMITS)
