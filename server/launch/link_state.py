"""The SuperLink's state: the clients' keys in a database, all else in memory.

Flower keeps either everything in memory or everything in SQLite, where a message costs
144 statements on its way to a client and back. Of all that, only the registered keys
are of use after a restart: a run that was going on has failed for Flower, and goes on
from its run folder.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import Message
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.constant import NodeStatus
from flwr.supercore.date import now
from flwr.supercore.object_store import ObjectStore, ObjectStoreFactory
from flwr.superlink.federation import FederationManager


class LinkState(InMemoryLinkState):
    """Flower's state in memory, with keys that outlive it.

    Attributes:
        on_message: called with a node when there is a message for it.
    """

    def __init__(
        self, database: str, manager: FederationManager, objects: ObjectStore
    ) -> None:
        """Reads the registered keys; nobody is online yet."""
        self._keys = SqlLinkState(database, manager, objects)
        self._keys.initialize()
        super().__init__(manager, objects)
        self.on_message: Callable[[int], None] = lambda node: None
        self._undelivered: dict[int, dict[str, None]] = {}  # node -> its messages
        for node in self._keys.get_node_info():
            # It was online for the server before this one, and activates itself again.
            if node.status == NodeStatus.ONLINE:
                node.status = NodeStatus.OFFLINE
            self._add_node(node)

    def has_messages(self, node_id: int) -> bool:
        """Tells whether there may be messages that the node has not got yet."""
        return bool(self._undelivered.get(node_id))

    def create_node(self, *owner: Any, **described: Any) -> int:
        """Registers a key durably."""
        with self.lock:
            node_id = self._keys.create_node(*owner, **described)
            for node in self._keys.get_node_info(node_ids=[node_id]):
                self._add_node(node)
            return node_id

    def delete_node(self, owner_aid: str, node_id: int) -> None:
        """Removes a key durably."""
        with self.lock:
            self._keys.delete_node(owner_aid, node_id)
            node = self.nodes[node_id]
            node.online_until = node.online_until or now().timestamp()
            super().delete_node(owner_aid, node_id)

    def store_message_ins(self, message: Message) -> str | None:
        """Stores a message, and says so."""
        node = message.metadata.dst_node_id
        with self.lock:
            self._forget_expired(node)
            stored = super().store_message_ins(message)
            if stored is not None:
                self._undelivered.setdefault(node, {})[stored] = None
        if stored is not None:
            self.on_message(node)
        return stored

    def get_message_ins(
        self, node_id: int, limit: int | None, *, run_id: int | None = None
    ) -> list[Message]:
        """Returns a node's messages, once; Flower's looks through those of all."""
        taken: list[Message] = []
        with self.lock:
            self._forget_expired(node_id)
            waiting = self._undelivered.get(node_id, {})
            for name in list(waiting):
                message = self.message_ins_store[name]
                if run_id in (None, message.metadata.run_id) and len(taken) != limit:
                    message.metadata.delivered_at = now().isoformat()
                    taken.append(message)
                    del waiting[name]
        return taken

    def _forget_expired(self, node_id: int) -> None:
        """Forgets what a node has not fetched in time; Flower keeps it to the end."""
        waiting = self._undelivered.get(node_id, {})
        self._check_stored_messages(set(waiting))
        for name in [name for name in waiting if name not in self.message_ins_store]:
            del waiting[name]
            self.object_store.delete(name)

    def _add_node(self, node: Any) -> None:
        """Takes a node over from the database."""
        self.nodes[node.node_id] = node
        self.owner_to_node_ids.setdefault(node.owner_aid, set()).add(node.node_id)
        if node.status != NodeStatus.UNREGISTERED:
            self.node_public_key_to_node_id[node.public_key] = node.node_id


class Factory(LinkStateFactory):
    """Makes the state once."""

    _making = threading.Lock()

    def state(self) -> Any:
        """Returns the state."""
        with self._making:
            if self.state_instance is None:
                self.state_instance = LinkState(
                    self.database,
                    self.federation_manager,
                    self.objectstore_factory.store(),
                )
        return self.state_instance


def factories(
    database: str, manager: FederationManager
) -> Sequence[ObjectStoreFactory | Factory]:
    """Returns what stands in for Flower's `get_objectstore_linkstate_factories`."""
    objects = ObjectStoreFactory()
    return objects, Factory(database, manager, objects)
