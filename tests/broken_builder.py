"""An engine that cannot start; imports nothing, so that this is known soon."""


def broken(config):
    raise RuntimeError("no such card")
