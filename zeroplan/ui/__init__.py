"""The page: one function from a request in JSON to a report in JSON, static files that show it, and a small server."""
