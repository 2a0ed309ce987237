"""Files and batches of requests, which survive the end of any process."""
