"""What is asked, how long, and when."""
