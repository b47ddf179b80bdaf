"""The real scheduler, block manager, prefix index, admission limits and router in virtual time: `headrace simulate`."""
