"""`headrace bench`: the engine beside the machine's limits, servers from the client's side. No part of the engine."""
