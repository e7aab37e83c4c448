"""Hostile peers that are tried by tests of their own, and the table of all."""

import itertools
from dataclasses import dataclass

from hostile_answers import ANSWERS
from hostile_requests import REQUESTS

CASES = REQUESTS + ANSWERS


@dataclass(frozen=True)
class Elsewhere:
    """An attack that is tried by a test of its own.

    Attributes:
        what: what is sent.
        peer: "server", "client" or "network".
        outcome: what becomes of it.
        test: "ROOM/FILE.py::NAME".
    """

    what: str
    peer: str
    outcome: str
    test: str


# (who is hostile, file) -> what is sent -> what becomes of it, and the test.
_ELSEWHERE: dict[tuple[str, str], dict[str, tuple[str, str]]] = {
    ("server", "clients/test_hostile_run.py"): {
        "an old round again, after a newer one": (
            "the node refuses, its state and its count stay",
            "test_an_old_round_is_not_answered_again",
        ),
        "other fakes for a round that was answered": (
            "the node refuses, its state and its count stay",
            "test_other_fakes_for_an_answered_round_are_refused",
        ),
        "the warm start again, in the middle of a run": (
            "nothing happens",
            "test_a_second_warm_start_changes_nothing",
        ),
        "a round for a node that was never prepared": (
            "the node refuses: its state is missing",
            "test_a_round_without_a_warm_start_is_refused",
        ),
        "a run with a larger batch, less noise or seeded noise than a client allows": (
            "the client refuses and says which limit",
            "test_a_run_outside_a_clients_limits_is_refused",
        ),
    },
    ("server", "federation/test_node.py"): {
        "the same request again and again": (
            "the stored bytes, no new noise, nothing counted",
            "test_a_repeated_request_gets_the_same_bytes_after_a_restart",
        ),
        "more releases than a client's client_epsilon": (
            "the client refuses and says which limit",
            "test_a_node_refuses_beyond_its_clients_epsilon",
        ),
    },
    ("client", "clients/test_hostile_run.py"): {
        "a poisoned answer in every round": (
            "a failed answer: asked once more, logged, counted; the run goes on "
            "without it where min_nodes allows, with the bytes of a run without that "
            "node",
            "test_a_poisoned_reply_is_a_failed_answer",
        ),
        "the answer of the round before": (
            "a failed answer",
            "test_a_replayed_reply_is_a_failed_answer",
        ),
        "the answer of another run": (
            "a failed answer",
            "test_a_reply_of_another_run_is_a_failed_answer",
        ),
        "an error of 10 MB over many lines": (
            "one line of at most 200 printable characters in the log",
            "test_a_long_error_is_one_line_of_the_log",
        ),
        "other records beside the answer": (
            "a failed answer",
            "test_a_reply_with_other_records_is_a_failed_answer",
        ),
    },
    ("network", "clients/test_hostile_run.py"): {
        "a reply from another address than the node's": (
            "a failed answer",
            "test_a_reply_of_another_sender_is_a_failed_answer",
        ),
    },
    ("network", "server/test_multihost.py"): {
        "a client that is not registered": (
            "Flower's SuperLink refuses its key; it never becomes a node",
            "test_unregistered_client_is_refused",
        ),
        "a server with a certificate of another authority": (
            "the client breaks the connection off before it says anything",
            "test_server_of_another_authority_is_refused",
        ),
        "a server with a valid certificate of another host": (
            "the client breaks the connection off",
            "test_server_under_another_name_is_refused",
        ),
        "a run, submitted from a machine that is not the server": (
            "status 403",
            "test_control_is_refused_over_the_network",
        ),
    },
    ("client", "clients/test_deployment.py"): {
        "another client's name": (
            "it may not join: its key was registered under its own",
            "test_a_stranger_may_not_join",
        ),
        "a name that is not in the run, or is not registered": (
            "it may not join",
            "test_a_stranger_may_not_join",
        ),
        "the name of a client that has joined": (
            "the first keeps it",
            "test_a_stranger_may_not_join",
        ),
    },
    ("client", "clients/test_deployment_faults.py"): {
        "late and repeated replies": (
            "thrown away",
            "test_late_and_repeated_replies_are_thrown_away",
        ),
        "an old state, put back": (
            "a failed answer: the client refuses or the server does",
            "test_a_client_with_an_old_state_is_refused",
        ),
    },
    ("server", "clients/test_deployment.py"): {
        "other settings under a known run's id": (
            "the client refuses; its state stays with the first",
            "test_another_run_under_a_known_id_is_refused",
        ),
        "sizes of nodes that are no numbers, do not add up, or are megabytes of text": (
            "the client refuses in one line of at most 300 characters and keeps "
            "nothing",
            "test_sizes_of_nodes_that_cannot_be_are_refused_in_few_words",
        ),
        "a run's id that is a path": (
            "the client refuses and makes no folder",
            "test_a_run_id_that_is_no_id_becomes_no_folder",
        ),
        "a run that does not suit the client": (
            "the client refuses to join and says which limit",
            "test_a_run_that_does_not_suit_a_client_is_refused_by_it",
        ),
    },
    ("server", "clients/test_deployment_faults.py"): {
        "a message without fakes, for a run that the client does not know": (
            "the client answers that it failed, without words of its own",
            "test_an_unknown_message_is_answered_without_words",
        ),
    },
    ("server", "clients/test_agreed.py"): {
        "run after run with another seed or other sizes, so that shards are cut anew": (
            "the client counts the releases of all shards for the whole data set, and "
            "refuses beyond its client_epsilon",
            "test_a_record_is_safe_from_servers_that_cut_the_data_anew",
        ),
        "a run without noise or with seeded noise, for a client that sets no limits": (
            "the client refuses to join and says which limit",
            "test_a_client_that_says_nothing_answers_neither_without_noise_nor_with_seeded",
        ),
    },
    ("server", "clients/test_count_behind.py"): {
        "no word on what it has of the client, or one that is none": (
            "the client refuses, and nothing is computed",
            "test_a_server_that_does_not_say_what_it_has_is_refused",
        ),
    },
    ("client", "clients/test_deployed_masks.py"): {
        "a masking key that another key than its registered one has signed": (
            "named and left out; the run goes on where min_nodes allows",
            "test_a_false_masking_key_names_its_sender_and_stops_nobody_else",
        ),
    },
    ("client", "experiments/test_deploy.py"): {
        "a request of more than 256 MiB, or that does not say": (
            "status 413, and nothing of it is read",
            "test_what_weighs_more_than_an_answer_is_not_read",
        ),
    },
    ("client", "server/test_exchange.py"): {
        "a reply that Flower cannot read": (
            "the client is asked again until the round's limit; the others' replies "
            "are taken",
            "test_a_reply_that_cannot_be_read_is_its_senders_trouble",
        ),
    },
    ("client", "clients/test_deployment_restored.py"): {
        "releases that never were, at joining": (
            "refused beyond the run's rounds, its selection, and 20 times above the "
            "ledger; within, the run goes on only with --accept-restore",
            "test_a_client_cannot_claim_more_than_can_be",
        ),
    },
    ("server", "clients/test_deployment_restored.py"): {
        "a history of the run that is none, or names folders": (
            "the client refuses and makes no folder",
            "test_a_malformed_request_to_join_is_refused",
        ),
        "start after start, each with an abandoned round": (
            "the client refuses once the states of 16 starts are set aside",
            "test_a_server_cannot_fill_a_clients_disk_with_states_set_aside",
        ),
    },
}
ELSEWHERE = [
    Elsewhere(what, peer, outcome, f"{file}::{test}")
    for (peer, file), attacks in _ELSEWHERE.items()
    for what, (outcome, test) in attacks.items()
]


# ------------------------------------------------------------------ the document


def table() -> str:
    """Returns the table of docs/hostile_inputs.md."""
    lines = ["| # | hostile | what is sent | what happens |", "|---|---|---|---|"]
    number = itertools.count(1)
    for case in CASES:
        run = " (compact)" if case.config.transport == "compact" else ""
        lines.append(
            f"| {next(number)} | {case.peer} | {case.what}{run} | `{case.outcome}` |"
        )
    for other in ELSEWHERE:
        lines.append(
            f"| {next(number)} | {other.peer} | {other.what} | {other.outcome} "
            f"(`{other.test}`) |"
        )
    return "\n".join(lines) + "\n"
