"""The HTTP routes, one module for each kind of work. A route reads a body, plans it, runs the plan, and replies."""
