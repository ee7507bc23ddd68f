"""Inside a rank process: join the group, run what the test sends, say what came of it."""

import atexit
import contextlib
import faulthandler
import gc
import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch
import torch.distributed as dist

from tests.harness.packed_calls import Call, Raised, Ready, Reset, Returned, Setup, Told
from tests.harness.priorities import put_gloo_behind

STACKS_SIGNAL = signal.SIGUSR1
JOIN_TIMEOUT = timedelta(seconds=60)

LONG_S = 0.03  # for a garbage collection


class Line:
    """The rank's end of the pipe: any thread may send, one thread listens."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._lock = threading.Lock()
        self.inbox: queue.SimpleQueue[Call | Reset] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="harness-line", daemon=True).start()

    def send(self, message: Any) -> None:
        with self._lock:
            self._conn.send_bytes(pickle.dumps(message))

    def _listen(self) -> None:
        # The pipe closes when the test is done with this rank, or when pytest itself is gone. A rank stuck in
        # a collective must die then too, so it does not ask. (PR_SET_PDEATHSIG would not do: our parent is the
        # fork server, which outlives pytest for as long as any rank does.)
        while True:
            try:
                message = pickle.loads(self._conn.recv_bytes())
            except (EOFError, OSError):
                os.kill(os.getpid(), signal.SIGKILL)
            self.inbox.put(message)


_fresh_line: list[Line] = []  # set once, in a fresh rank: tell() has no argument to carry it


def tell(message: Any) -> None:
    """Inside a rank of `start_ranks`: send `message` to the test, which reads it with `group.message(rank)`."""
    if not _fresh_line:
        raise RuntimeError("tell() was called outside a fresh rank; call it in a function given to start_ranks")
    _fresh_line[0].send(Told(pickle.dumps(message)))


class DefaultGroup:
    """This rank's default process group, which can be left and met again under a new name."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._store = dist.TCPStore("127.0.0.1", setup.store_port, is_master=False, timeout=JOIN_TIMEOUT)

    def join(self, generation: int) -> None:
        # a prefix of its own: without it a second group would read the first one's addresses and connect to nobody
        store = dist.PrefixStore(f"harness{generation}", self._store)
        rank, size = self._setup.rank, self._setup.world_size
        dist.init_process_group(self._setup.backend, store=store, rank=rank, world_size=size)
        self._clean = self._fingerprint()

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def changed(self) -> bool:
        return self._fingerprint() != self._clean

    def _fingerprint(self) -> tuple[int, int, int]:
        world = dist.distributed_c10d._world  # the only place that lists the groups
        return id(dist.group.WORLD), len(world.pg_map), world.group_count


def restore_defaults(environ: dict[str, str], folder: str) -> None:
    """What an earlier call may have changed. Every rank gets the same seed, as a script that calls manual_seed does."""
    if dict(os.environ) != environ:
        os.environ.clear()
        os.environ.update(environ)
    os.chdir(folder)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(True)  # torch turns it off for good when a 16-bit product fails in it
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)  # not always: it imports the compiler, which takes seconds


def caught(error: BaseException, started_s: float) -> Raised:
    now_s = time.monotonic()
    text = "".join(traceback.format_exception(error))
    return Raised(type(error).__name__, str(error), text, now_s, now_s - started_s)


def perform(call: Call) -> tuple[bytes, float]:
    """The pickled result and the seconds it took."""
    started_s = time.monotonic()
    fn, args, kwargs = pickle.loads(call.payload)
    with warnings.catch_warnings():
        value = fn(*args, **kwargs)
    return pickle.dumps(value), time.monotonic() - started_s


def serve(setup: Setup, line: Line) -> None:
    """A pool's rank: answer calls until the pipe closes."""
    group = DefaultGroup(setup)
    group.join(0)
    environ, folder = dict(os.environ), os.getcwd()
    gc.freeze()  # what it has imported since then
    line.send(Ready())
    while True:
        message = line.inbox.get()
        if isinstance(message, Reset):
            group.leave()
            group.join(message.generation)
            line.send(Ready())
            continue
        restore_defaults(environ, folder)
        started_s = time.monotonic()
        reply: Raised | Returned
        try:
            reply = Returned(*perform(message), left_groups=group.changed())
        except BaseException as error:  # SystemExit too: the pool outlives the call
            reply = caught(error, started_s)
        collect_garbage()  # before the answer, so that a destructor that hangs is this call's hang
        line.send(reply)


def collect_garbage() -> None:
    """Collect what a call leaves. If that takes long the call has imported much, which is then left out for good."""
    started_s = time.monotonic()
    gc.collect()
    if time.monotonic() - started_s > LONG_S:
        gc.freeze()


def serve_once(setup: Setup, line: Line) -> None:
    """A fresh rank: one call, then exit as a script would, with status 0, 1 or what sys.exit was given."""
    _fresh_line.append(line)
    started_s = time.monotonic()
    try:
        group = DefaultGroup(setup) if setup.init else None
        if group is not None:
            group.join(0)
        restore_defaults(dict(os.environ), os.getcwd())
        line.send(Returned(*perform(line.inbox.get()), left_groups=False))
        atexit._run_exitfuncs()  # which multiprocessing leaves out
        if group is not None:
            group.leave()
    except SystemExit as error:
        line.send(caught(error, started_s))
        raise
    except BaseException as error:
        line.send(caught(error, started_s))
        sys.stdout.flush()
        os._exit(1)  # at once, as a crash: peers must see the connection close now


def torchrun_environ(setup: Setup) -> dict[str, str]:
    rank, world_size = str(setup.rank), str(setup.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": "0",
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(setup.store_port),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": "harness",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the test holds the store, as torchrun's agent does
        **setup.env,
    }


def rank_main(setup: Setup, conn: Connection) -> None:
    # Ctrl-C is pytest's to handle; it then ends us. A handler, because a run leaves an ignored signal alone (nohup).
    signal.signal(signal.SIGINT, lambda *_: None)
    gc.freeze()  # what it was forked with; collecting what a call leaves takes 0.002 s instead of 0.2 s
    gc.enable()
    # chain: the default action follows the dump, so the process's death tells the test that the stacks are complete
    stacks = os.open(setup.stacks_path, os.O_WRONLY | os.O_CREAT)
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=True)
    os.environ.update(torchrun_environ(setup))
    put_gloo_behind()
    line = Line(conn)
    started_s = time.monotonic()
    if setup.once:
        serve_once(setup, line)
        return
    try:
        serve(setup, line)
    except BaseException as error:
        with contextlib.suppress(OSError):
            line.send(caught(error, started_s))
