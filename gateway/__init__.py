"""The platform on your machine: queue, worker protocol, user API. Knows HTTP and jobs, never models."""
