"""`python -m relax_hpc.roles ROLE RUN …`: one process of a role, as a job step starts it; others are forked (supervise/fork_server.py).

The environment is prepared before torch is imported, so the role's module is imported last.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from relax_hpc import checkpoint
from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import OPTIMIZERS, RunDir, open_existing
from relax_hpc.recipe import RecipeError, load_recipe
from relax_hpc.registry import RegistryError
from relax_hpc.roles.common.process import BEGINNING, Exit, RoleProcess, Stop, place_of
from relax_hpc.telemetry import Orphaned, set_up_logging

ROLES = {
    "trainer": "training.trainer",
    "rollout": "rollout.worker",
    "scorer": "scoring.scorer",
    "critic": "scoring.critic",
}
GPUS = ("/dev/nvidiactl", "/dev/kfd")
PIPE_BYTES = 4096
"""Bytes that a pipe takes whole while nobody reads."""


def main(words: Sequence[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(
        prog="python -m relax_hpc.roles", description="One process of a role; started by a supervisor."
    )
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("run", help="the run directory")
    parser.add_argument("--name", required=True, help="unique name of this process, such as rollout-3")
    parser.add_argument("--attempt", type=int, default=0, help="how often it was started before")
    parser.add_argument("--supervisor", type=int, help="pid of the supervisor; when it is gone, the role leaves")
    parser.add_argument("--final-message", type=int, help="file descriptor for what it says when it fails")
    parser.add_argument("--claim-dir", help="rollout: name of the folder for claims; one process has it, once")
    parser.add_argument("--incarnation", help="trainer: folder through which it commits")
    parser.add_argument(
        "--rank",
        type=int,
        default=0,
        help="this process among --world: of its group, or of scorers that work each alone",
    )
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument(
        "--slurm-task",
        action="store_true",
        help="of a group: the rank is that of the Slurm task, NAME is NAME-RANK",
    )
    parser.add_argument("--deadline", type=float, help="trainer: Unix time at which this allocation ends")
    arguments = parser.parse_args(words)
    if arguments.slurm_task:
        arguments.rank = int(os.environ["SLURM_PROCID"])
        arguments.name = f"{arguments.name}-{arguments.rank}"
    set_up_logging(arguments.name)
    of = open_existing(arguments.run)
    code = run(RoleProcess(arguments, of, load_recipe(of.recipe)), arguments.role)
    logging.shutdown()
    # Threads of torch and of reward pools must not hold up the end of a role that has sent its last message.
    os._exit(code)


def run(process: RoleProcess, role: str) -> Exit:
    """Run the role's body and return its exit code; errors that a person must see go into heartbeat and log."""
    prepare_cpu()
    # For libraries that torch.set_num_threads does not reach.
    table = process.recipe.rollout if role == "rollout" else process.recipe.trainer
    os.environ["OMP_NUM_THREADS"] = str(table.threads)
    process.caches.warm()
    try:
        if role in OPTIMIZERS:
            read_ahead(process, role)
        gc.disable()  # see supervise/fork_server.py
        module = importlib.import_module(f"relax_hpc.roles.{ROLES[role]}")
        gc.freeze()
        gc.enable()
        code: Exit = module.body(process)
        return code
    except Stop:
        return Exit.STOPPED
    except Orphaned as gone:
        process.log.warning("%s", gone)
        return Exit.FENCED
    except (RunError, RecipeError, RegistryError) as error:
        process.log.error("%s", error)
        send_final_message(process, "failed", str(error))
        return Exit.FATAL
    except Exception as error:
        process.log.exception("unexpected error")
        place = place_of(error) if process.telemetry.state in BEGINNING else ""
        send_final_message(process, "crashed", f"{type(error).__name__}: {error}", place)
        return Exit.CRASHED


def read_ahead(process: RoleProcess, role: str) -> None:
    """Begin to read the newest checkpoint's optimizer while torch is still to be imported, if this process will keep it
    on the CPU.

    A GPU gets it tensor by tensor: the host may have no room for the optimizers of all processes.
    """
    device = process.recipe.trainer.device
    on_cpu = device == "cpu" or (device == "auto" and not any(map(os.path.exists, GPUS)))
    if on_cpu and "torch" not in sys.modules:
        run = process.run if role == "trainer" else RunDir(process.run.critic)
        with contextlib.suppress(OSError):  # the process that loads it reports what is wrong
            checkpoint.begin_reading(run, OPTIMIZERS[role])


def send_final_message(process: RoleProcess, state: str, error: str, place: str = "") -> None:
    """Send a last message to the supervisor's pipe, and write it into the heartbeat for later readers.

    place: FILE:LINE of an error that the next start will meet again.
    """
    if process.arguments.final_message is not None:
        os.write(process.arguments.final_message, error.encode()[:PIPE_BYTES])
    process.telemetry.heartbeat(state, error=error, place=place or None)


def prepare_cpu() -> None:
    """Choose, before torch is imported, an instruction set that is really there.

    Some CPUs advertise AMX to guests and do not have it: bf16 matrix products would die with SIGILL.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


if __name__ == "__main__":
    main()
