"""Several models behind one address: loaded when they are asked for, within a budget of memory."""
