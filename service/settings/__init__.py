"""Every setting of the service, in one table."""
