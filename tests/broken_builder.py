"""An engine that cannot start; imports nothing, so that this is known soon."""


def broken(config):
    raise RuntimeError("no such card")


def mistaken(config):
    from headrace.errors import ParameterError

    raise ParameterError("device", config.device, "a card of another kind")
