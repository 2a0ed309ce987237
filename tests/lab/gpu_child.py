"""A stand-in for the GPU bench's child process, which follows its commands without torch."""

import json
import os
import sys
import time

order = json.loads(sys.argv[1])
CASES = ["machine", *order["commands"]]
with os.fdopen(order["pipe"], "w") as pipe:

    def send(**message: object) -> None:
        print(json.dumps(message), file=pipe, flush=True)

    wanted = [name for name in CASES if name not in order["leave"]]
    send(plan=wanted)
    for name in wanted:
        send(begin=name)
        if name.startswith("dies"):
            os.kill(os.getpid(), 9)
        if name.startswith("hangs"):
            time.sleep(60)
        if name.startswith("stops"):
            send(stop="attention is not Triton's")
            sys.exit()
        send(case=name, process=os.getpid())
        if name.startswith("loses"):
            sys.exit(75)
    if "ends badly" in order["commands"]:
        sys.exit(1)
