"""Building blocks of family tables: weight rules, checked settings, shared parts."""
