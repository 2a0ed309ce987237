"""What a family's table is written with: weight rules, checked settings, shared parts."""
