"""Several front processes: a hub that owns the engine, and workers that serve HTTP on one port."""
