"""Waits in one call until SIGINT: python interrupted_process.py SOCKET CALL. See test_C27_ctrl_c_within_a_second.

Prints "interrupted TIME" (time.monotonic, the same clock in all processes) when KeyboardInterrupt has arrived.
"""

import pathlib
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import mlpo  # noqa: E402

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what runs in the background of a shell
socket, call = sys.argv[1:]
client = mlpo.connect(socket=socket, job="interrupted")
subgroup = client.subgroup("w", 10)
subgroup.submit_grad().result(30)
if call == "step":
    import torch
    from mlpo.torch import OffloadAdamW

    weight = torch.nn.Parameter(torch.ones(10))
    weight.grad = torch.ones(10)
    optimizer = OffloadAdamW([weight], client=client, lr=0.5, weight_decay=0.0)
    optimizer.step()

print("ready", flush=True)
sys.stdin.readline()
request = subgroup.submit_update()
print("waiting", flush=True)
try:
    if call == "result":
        request.result()
    elif call == "read_state":
        subgroup.read_state()
    elif call == "discard":
        client.discard()
    elif call == "step":
        optimizer.step()
    elif call == "connect":
        mlpo.connect(socket=socket, job="interrupted-too")
    sys.exit(f"{call} returned from a daemon that stands still")
except KeyboardInterrupt:
    print("interrupted", time.monotonic(), flush=True)

# The daemon goes on now, and so does the session; an interrupted step is forgotten or finished, never half done.
assert request.result(30) == 1
if call == "step":
    optimizer.step()
    steps = int(optimizer.state_dict()["state"][0]["step"])
    assert steps in (2, 3), steps
    assert abs(weight.detach().mean().item() - (1 - 0.5 * steps)) < 1e-5
client.close()
