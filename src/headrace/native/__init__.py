"""The step of a CPU in one native call, one wing: `forward.py` runs it by the library that `load.py` opens; seam: `Forward`."""
