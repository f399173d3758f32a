"""The ranks of a job as Lightning sees them: connection, collectives, faults, requests to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.environments import ClusterEnvironment, SLURMEnvironment
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor

from lightning_entrain.errors import ConfigError, RankFailedError
from lightning_entrain.runtime.activity import BETWEEN, Activity
from lightning_entrain.runtime.faults import FaultWatch, is_lost_connection
from lightning_entrain.runtime.launcher import EntrainLauncher, die_with_parent
from lightning_entrain.runtime.signals import EXIT_CODES, INTERRUPT, STOP, StopRequest

_Result = TypeVar("_Result")
_START_TIMEOUT = timedelta(minutes=5)


class RankStrategy(ParallelStrategy):
    """Processes that work, fail and stop together; knows nothing of models.

    Args:
        timeout_seconds: How long a message or collective may take before the job ends.
        stop_seconds: How long a rank may take to finish its step after SIGTERM or Ctrl-C,
            before it saves.
        process_group_backend: ``"gloo"`` or ``"nccl"``; None takes the device's default.
        options: As of Lightning's ParallelStrategy.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float,
        stop_seconds: float,
        process_group_backend: str | None,
        **options: Any,
    ) -> None:
        for name, seconds in (("timeout_seconds", timeout_seconds), ("stop_seconds", stop_seconds)):
            if not seconds > 0:
                raise ConfigError(f"{name} is {seconds}", limit="more than 0")
        super().__init__(**options)
        self.num_nodes = 1
        self._timeout = timedelta(seconds=timeout_seconds)
        self._stop_seconds = stop_seconds
        self._process_group_backend = process_group_backend
        self._watch: FaultWatch | None = None
        self._activity = Activity()
        self._failed = False
        self._stop_request: StopRequest | None = None

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one rank; Lightning reduces logged values only then."""
        return self.num_processes * self.num_nodes > 1

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning which rank this is."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Connect the ranks."""
        super().setup_environment()
        self._failed = False
        die_with_parent()
        self.set_world_ranks()
        if self._stop_request is None:
            self._stop_request = StopRequest(
                self._stop_seconds,
                self._requeue_signal(),
                announce=self.global_rank == 0,
                on_forced_end=self._tell_forced_end,
            )
        if not self.is_distributed:
            return
        assert self.cluster_environment is not None
        if not dist.is_initialized():
            reset_seed()
            backend = self._process_group_backend or _get_default_process_group_backend_for_device(
                self.root_device
            )
            # No device_id: NCCL would then split the world communicator once per channel.
            start = max(self._timeout, _START_TIMEOUT)  # the others may still be importing
            with _naming_a_port_in_use(self.cluster_environment.main_port):
                _init_dist_connection(
                    self.cluster_environment,
                    backend,
                    timeout=start,
                    **_store_of_attempt(self.cluster_environment, start),
                )
            dist.distributed_c10d._set_pg_timeout(self._timeout, dist.group.WORLD)
        if self._watch is None:
            self._watch = FaultWatch(
                self.global_rank,
                self.world_size,
                self._activity,
                self.cluster_environment.main_address,
                self.cluster_environment.main_port,
            )
            self._watch.start()
        self._note_end(orderly=False)
        if isinstance(self._launcher, EntrainLauncher):
            self._launcher.on_child_failure = self._report_child

    def _report_child(self, local_rank: int, ending: str) -> None:
        if self._watch is not None:
            rank = self.node_rank * self.num_processes + local_rank
            self._watch.publish(rank, f"its process {ending}")

    def _tell_forced_end(self, text: str) -> None:
        if self._watch is not None:
            self._watch.publish(self.global_rank, f"it {text}")

    def _requeue_signal(self) -> signal.Signals | None:
        environment = self.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            return environment.requeue_signal or signal.SIGUSR1
        return None

    def on_train_start(self) -> None:
        """Take signals over from Lightning, whose handler starts a collective at once."""
        self._heed_signals()

    def on_validation_start(self) -> None:
        """As at the start of training; the sanity check comes before that."""
        self._heed_signals()

    def on_test_start(self) -> None:
        """As at the start of training."""
        self._heed_signals()

    def on_predict_start(self) -> None:
        """As at the start of training."""
        self._heed_signals()

    def _heed_signals(self) -> None:
        if self._stop_request is not None:
            self._stop_request.install()

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            nccl = dist.get_backend() == "nccl"
            self._together(dist.barrier, device_ids=[self.root_device.index] if nccl else None)

    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Send an object from one rank to all."""
        if not dist.is_initialized():
            return obj
        box = [obj]
        self._together(dist.broadcast_object_list, box, src)
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks."""
        if isinstance(tensor, Tensor):
            return self._together(_sync_ddp_if_available, tensor, group, reduce_op=reduce_op)
        return tensor

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``training_step``; an error is told to all ranks at once."""
        self._activity.enter(BETWEEN)
        return self._told_to_all(super().training_step, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``validation_step``; an error is told to all ranks at once."""
        return self._told_to_all(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``test_step``; an error is told to all ranks at once."""
        return self._told_to_all(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's ``predict_step``; an error is told to all ranks at once."""
        return self._told_to_all(super().predict_step, *args, **kwargs)

    def _told_to_all(self, step: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
        try:
            with self._activity.during(getattr(step, "__name__", "a step")):
                return step(*args, **kwargs)
        except Exception as error:
            self._raise_first(error)
            raise

    def _together(self, collective: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
        """Run what waits for all ranks."""
        name = getattr(collective, "__name__", "a collective").strip("_")
        return self._told_to_all(self._waiting, name, collective, *args, **kwargs)

    def _waiting(
        self, name: str, collective: Callable[..., _Result], *args: Any, **kwargs: Any
    ) -> _Result:
        with self._activity.during(name, waits=True):
            return collective(*args, **kwargs)

    def _raise_first(self, error: BaseException) -> None:
        """Report this rank's error; if another rank was first, raise that one's."""
        if self._watch is None:
            return
        self._watch.report(error)
        first = self._watch.first_error()
        if first is not None and (first.rank != self.global_rank or first.hanging):
            remedy = "raise timeout_seconds if it was slow only" if first.hanging else ""
            cause = None if is_lost_connection(error) else error
            raise RankFailedError(first.text, remedy=remedy) from cause

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks, so that all end together."""
        self._failed = True
        if self._watch is not None and not isinstance(exception, SIGTERMException):
            self._watch.report(exception)
            first = self._watch.first_error()
            other = first is not None and first.rank != self.global_rank
            if first is not None and other and is_lost_connection(exception):
                print(f"[rank {self.global_rank}] {first.text}", file=sys.stderr, flush=True)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Give signals back; the ranks stay connected for a further fit or validate.

        Raises:
            SIGTERMException: If this rank was asked to stop after the last step, when no step was
                left to leave after.
        """
        asked = 0
        if self._stop_request is not None:
            asked = self._stop_request.kind
            self._stop_request.remove()
            self._stop_request = None
        self._note_end(orderly=not self._failed)
        super().teardown()
        if asked in (INTERRUPT, STOP) and not self._failed:
            raise SIGTERMException(EXIT_CODES[asked])

    def _note_end(self, *, orderly: bool) -> None:
        if self._watch is not None:
            self._watch.orderly = orderly
        if isinstance(self._launcher, EntrainLauncher):
            self._launcher.orderly = orderly


@contextlib.contextmanager
def _naming_a_port_in_use(port: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"Port {port} is in use on this machine",
            limit="the ranks meet at a port of their own",
            remedy="set MASTER_PORT to a free one, or unset it",
        ) from error


def _store_of_attempt(environment: ClusterEnvironment, timeout: timedelta) -> dict[str, Any]:
    """A part of torchrun's store for this attempt alone, as an option of init_process_group.

    The agent's store may outlive a restart, with the addresses of the processes that are gone.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store = dist.TCPStore(
        environment.main_address, environment.main_port, is_master=False, timeout=timeout
    )
    return {"store": dist.PrefixStore(f"attempt_{attempt}", store)}
