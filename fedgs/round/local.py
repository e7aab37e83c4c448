"""The local engine: one process, no Flower; the nodes are spread over threads.

Each thread computes whole nodes with one torch thread of its own, so the
number of workers does not change a bit of the result.

With secure aggregation the nodes' integers are added up without masks, which would
cancel: this process is one curator and sees all of them. So a run has the same bits as
in Flower.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Self

import torch

from fedgs.config.run_config import ResolvedConfig
from fedgs.data.federated import FederatedImages
from fedgs.gan.warm_start import OnStep, num_steps
from fedgs.methods.base import Request
from fedgs.methods.schedule import nodes_of
from fedgs.privacy.client_limits import ClientRefused
from fedgs.process import keep_freed_memory
from fedgs.round.messages import NodeRelease
from fedgs.round.node import Node
from fedgs.round.node_state import discriminators_config
from fedgs.round.run import Report, RunSession, Stop
from fedgs.runs.run_folder import RunFolder, node_folder


def train(folder: RunFolder, data: FederatedImages, report: Report, stop: Stop) -> None:
    """Trains a run in this process, from its last checkpoint or from the start.

    Privacy: releases (epsilon, delta)-DP output; events: in the folder's ledger.

    Args:
        folder: the run folder; its configuration is resolved.
        data: the clients' images.
        report: called with the public metrics of each round.
        stop: when set, the run checkpoints after the current round and stops.

    Raises:
        RunStopped: the run ended early with a checkpoint.
        UserError: another process trains in this folder, or it is corrupted.
    """
    torch.set_num_threads(1)  # another number would round sums in another order
    keep_freed_memory()
    with folder.locked(), LocalNodes(folder.config, data, folder.private) as nodes:
        nodes.check_clients()
        train_nodes(folder, nodes, report, stop)


def train_nodes(
    folder: RunFolder,
    nodes: "LocalNodes",
    report: Report,
    stop: Stop,
) -> None:
    """Trains a run with nodes of this process; the loop of the local engine.

    Privacy: as `train`.
    """
    with RunSession.opened(folder, report, nodes.save) as training:
        training.settle(stop)
        while training.goes_on:
            new = training.unprepared()
            if new:
                nodes.prepare(training.preparation, new, training.on_warm_start(stop))
            request = training.begin()
            answers = nodes.answers(request)
            training.finish(answers, nodes.failures)
            training.stop_if_asked(stop)
            training.settle(stop)
        training.save_generator()


class LocalNodes:
    """All nodes of a run in this process, spread over threads; made when first needed.

    Attributes:
        failures: why nodes did not answer the last request; public texts.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        data: FederatedImages,
        private: Path,
    ) -> None:
        """Starts the worker threads; the nodes' states are in the private folder."""
        self.config = config
        self.data = data
        self.private = private
        self.nodes: dict[int, Node] = {}
        self.failures: list[str] = []
        num_threads = 1  # a card computes for one node at a time
        if config.device == "cpu":
            num_threads = config.num_workers
        self.pool = ThreadPoolExecutor(
            num_threads,
            # OpenMP keeps this number for each of the threads by itself.
            initializer=torch.set_num_threads,
            initargs=(1,),
        )

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the worker threads; a process that is to end now waits for none."""
        is_hurried = error[:1] == (KeyboardInterrupt,)
        self.pool.shutdown(wait=not is_hurried, cancel_futures=True)

    def answers(self, request: Request) -> Sequence[NodeRelease]:
        """Answers a request with all nodes concerned; a failing node raises.

        If the clients of one node refuse, no node trains, and nobody answers: the run
        can go on later from the round before.
        """
        nodes = nodes_of(self.config, request.trainees)
        requests = request.per_node(self.config.hosting, nodes)
        # All are asked before the first one trains and counts a release.
        refusals = self.pool.map(self._refusal, nodes, requests.values())
        self.failures = [refusal for refusal in refusals if refusal]
        if self.failures:
            return []
        results = self.pool.map(self._answer, nodes, requests.values())
        return [answer for answer in results if answer is not None]

    def _refusal(self, node_id: int, request: Request) -> str:
        try:
            self._node(node_id).check(request)
        except ClientRefused as error:
            return f"node {node_id}: {error}"
        return ""

    def prepare(self, request: Request, nodes: Sequence[int], on_step: OnStep) -> None:
        """Has the nodes make their discriminators.

        Args:
            request: of round 0.
            nodes: who makes them.
            on_step: called with the steps of all these nodes together, and their
                number. What it raises ends them.
        """
        requests = request.per_node(self.config.hosting, nodes)
        config = discriminators_config(self.config)
        total = 0
        for node_id in nodes:
            hosted = self.config.hosting.hosted(node_id)
            total += num_steps(config, len(hosted))
        done: Counter[int] = Counter()
        lock = Lock()  # the nodes' threads tell at once

        def tell(node_id: int, step: int, steps: int) -> None:
            with lock:
                done[node_id] = step
                on_step(done.total(), total)

        def prepare_one(node_id: int, own: Request) -> None:
            self._prepare(node_id, own, partial(tell, node_id))
            # Also of a node that was prepared before, which takes no step.
            hosted = self.config.hosting.hosted(node_id)
            done[node_id] = num_steps(config, len(hosted))

        # The list waits for all of them, and raises what one of them raised.
        list(self.pool.map(prepare_one, nodes, requests.values()))

    def check_clients(self) -> None:
        """Refuses to go on with other clients, before a round is charged for.

        Raises:
            UserError: as `fedgs.round.node_state.NodeState.check_clients`.
        """
        for node_id in range(self.config.num_nodes):
            # A node that no round has asked yet keeps nothing.
            if node_folder(self.private, node_id).is_dir():
                self._node(node_id).state.check_clients()

    def save(self, keep_round: int) -> None:
        """Writes the state of every node that changed."""
        for node in list(self.nodes.values()):
            node.save(keep_round)

    def _prepare(self, node_id: int, request: Request, on_step: OnStep) -> None:
        node = self._node(node_id)
        node.on_step = on_step
        node.answer(request)

    def _answer(self, node_id: int, request: Request) -> NodeRelease | None:
        return self._node(node_id).answer(request)

    def _node(self, node_id: int) -> Node:
        # No lock: a request asks a node once, so that no two threads make it.
        if node_id not in self.nodes:
            self.nodes[node_id] = Node(self.config, node_id, self.data, self.private)
        return self.nodes[node_id]
