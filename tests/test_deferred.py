"""What torch imports for its compilers waits until it is wanted, and is then what it always was."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, threading
from headrace.deferred import LATER, defer_imports
defer_imports()
import torch
assert LATER <= set(sys.modules), "this torch imports others"
assert "torch._decomp" not in sys.modules, "it was run"
x = torch.arange(6.0).view(2, 3)
assert (torch.mm(x, x.T) + 1).softmax(-1).sum().item() == 2
module, found = sys.modules["torch._meta_registrations"], []
assert not hasattr(module, "__path__") and "torch._decomp" not in sys.modules
threads = [threading.Thread(target=lambda: found.append(module.meta_mm)) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == 3 and "torch._decomp" in sys.modules
assert torch.mm(x.to("meta"), x.T.to("meta")).shape == (2, 2)
try:
    module.nothing
except AttributeError as e:
    assert "nothing" in str(e)
else:
    raise AssertionError
"""


def test_it_is_run_when_something_is_looked_for():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
