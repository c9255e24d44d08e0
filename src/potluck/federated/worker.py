"""What each worker of ``potluck federated run`` runs: the server's function on the first, a client
on the others."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from potluck._core.background import start_thread
from potluck._core.context import DistributedContext, init
from potluck.errors import AgentLost, Evicted, OperationTimeout, PotluckError, RemoteError
from potluck.federated.definition import Site, load
from potluck.federated.federation import Federation
from potluck.federated.participant import Participant
from potluck.federated.remote import LEADER, RemoteClients, serve_client


def main(arguments: Sequence[str]) -> None:
    """Be the server or a client of the job's federation, to its end."""
    parser = argparse.ArgumentParser()
    for name in ("--server", "--client"):
        parser.add_argument(name, required=True)
    parser.add_argument("--data-dir")
    parser.add_argument("--history", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep-output", action="store_true")
    given = parser.parse_args(arguments)
    folder = Path(sys.argv[0]).absolute().parent
    with init() as ctx, kept(ctx) as ended:
        if ctx.group.me.worker == LEADER:
            lead(ctx, folder / given.server, given.history, given.seed)
        else:
            if given.keep_output:
                keep_output(ctx, folder)
            data_dir = Path(given.data_dir).expanduser() if given.data_dir else None
            sends = not given.keep_output
            be_client(ctx, folder / given.client, data_dir, ended, sends_texts=sends)


def lead(ctx: DistributedContext, file: Path, history: Path | None, seed: int) -> None:
    """Run the server's function; then stop the clients. The reports of its rounds go to the file
    ``history``, as JSON."""
    clients = RemoteClients(ctx)
    federation = Federation(clients, seed=seed, say=lambda text: ctx.report(event=text))
    try:
        load(file, "server")(federation)
    finally:
        if history is not None:
            runs = [each.as_dict() for each in federation.histories]
            history.write_text(json.dumps(runs, indent=2) + "\n")
    clients.stop()


def be_client(
    ctx: DistributedContext,
    file: Path,
    data_dir: Path | None,
    ended: threading.Event,
    *,
    sends_texts: bool,
) -> None:
    """Be a client until the run is over. A client that can't take part reports why, and waits: the
    run goes on."""
    me = ctx.group.me.worker
    participant, unfit = None, ""
    if data_dir is not None and not data_dir.is_dir():
        unfit = f"there is no folder {data_dir} here (--data-dir)"
    else:
        try:
            function = load(file, "client")
        except (Exception, SystemExit) as error:
            text = f": {error}" if sends_texts else ""
            unfit = f"{file.name} can't be loaded: {type(error).__name__}{text}"
            traceback.print_exception(error)
        else:
            # The first of the job's workers is the server; workers that come later have numbers
            # after all others.
            rank, num_workers = map(int, os.environ["POTLUCK_WORLD_RANK"].split("/"))
            place = Site(me, rank - 1, num_workers - 1, data_dir)
            participant = Participant(function, place, sends_texts=sends_texts)
            participant.complain = lambda text: print(text, file=sys.stderr, flush=True)
    serve_client(ctx, participant, ended, unfit)


def keep_output(ctx: DistributedContext, folder: Path) -> None:
    """Redirect this worker's output to a file of its machine: it may quote data, and the output of
    workers is sent to the machine of the command."""
    file = folder / f"client-{ctx.group.me.worker}.log"
    ctx.report(event=f"its output stays on its machine, in {file}")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


_EVERY_S = 0.1


@contextlib.contextmanager
def kept(ctx: DistributedContext) -> Iterator[threading.Event]:
    """A block in which this worker enters each next group of ``ctx`` as soon as it is announced, so
    that clients can join and leave although no collective call is made. The event is set when the
    job is over for this worker."""
    is_over, ended = threading.Event(), threading.Event()

    def keep() -> None:
        while not (is_over.is_set() or ended.wait(_EVERY_S)):
            error = ctx.communicator.error
            if isinstance(error, RemoteError | AgentLost):
                ended.set()
            elif ctx.has_next_group or isinstance(error, Evicted):
                try:
                    ctx.reform(error if isinstance(error, Evicted) else None)
                except OperationTimeout:
                    continue
                except PotluckError:
                    ended.set()

    thread = start_thread(
        keep, name="potluck-federated-groups", on_broken=lambda error: ended.set()
    )
    try:
        yield ended
    finally:
        is_over.set()
        thread.join(2 * _EVERY_S)
