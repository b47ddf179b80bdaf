"""Measuring a server from the client's side: workloads, arrivals, a lean HTTP client, figures."""
