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
        test: "tests/FILE.py::NAME".
    """

    what: str
    peer: str
    outcome: str
    test: str


_RUN = "tests/clients/test_hostile_run.py::"
_HOSTS = "tests/server/test_multihost.py::"
_DEPLOYED = "tests/clients/test_deployment.py::"
_FAULTS = "tests/clients/test_deployment_faults.py::"
_AGREED = "tests/clients/test_agreed.py::"
_RESTORED = "tests/clients/test_deployment_restored.py::"
ELSEWHERE = [
    Elsewhere(
        "an old round again, after a newer one",
        "server",
        "the node refuses, its state and its count stay",
        _RUN + "test_an_old_round_is_not_answered_again",
    ),
    Elsewhere(
        "other fakes for a round that was answered",
        "server",
        "the node refuses, its state and its count stay",
        _RUN + "test_other_fakes_for_an_answered_round_are_refused",
    ),
    Elsewhere(
        "the same request again and again",
        "server",
        "the stored bytes, no new noise, nothing counted",
        _RUN + "test_the_same_request_gets_the_same_bytes_and_costs_nothing",
    ),
    Elsewhere(
        "the warm start again, in the middle of a run",
        "server",
        "nothing happens",
        _RUN + "test_a_second_warm_start_changes_nothing",
    ),
    Elsewhere(
        "a round for a node that was never prepared",
        "server",
        "the node refuses: its state is missing",
        _RUN + "test_a_round_without_a_warm_start_is_refused",
    ),
    Elsewhere(
        "more releases than a client's client_epsilon",
        "server",
        "the client refuses and says which limit",
        _RUN + "test_releases_beyond_a_clients_limit_are_refused",
    ),
    Elsewhere(
        "a run with a larger batch, less noise or seeded noise than a client allows",
        "server",
        "the client refuses and says which limit",
        _RUN + "test_a_run_outside_a_clients_limits_is_refused",
    ),
    Elsewhere(
        "a poisoned answer in every round",
        "client",
        "a failed answer: asked once more, logged, counted; the run goes on without "
        "it where min_nodes allows, with the bytes of a run without that node",
        _RUN + "test_a_poisoned_reply_is_a_failed_answer",
    ),
    Elsewhere(
        "the answer of the round before",
        "client",
        "a failed answer",
        _RUN + "test_a_replayed_reply_is_a_failed_answer",
    ),
    Elsewhere(
        "the answer of another run",
        "client",
        "a failed answer",
        _RUN + "test_a_reply_of_another_run_is_a_failed_answer",
    ),
    Elsewhere(
        "an error of 10 MB over many lines",
        "client",
        "one line of at most 200 printable characters in the log",
        _RUN + "test_a_long_error_is_one_line_of_the_log",
    ),
    Elsewhere(
        "other records beside the answer",
        "client",
        "a failed answer",
        _RUN + "test_a_reply_with_other_records_is_a_failed_answer",
    ),
    Elsewhere(
        "a reply from another address than the node's",
        "network",
        "a failed answer",
        _RUN + "test_a_reply_of_another_sender_is_a_failed_answer",
    ),
    Elsewhere(
        "a client that is not registered",
        "network",
        "Flower's SuperLink refuses its key; it never becomes a node",
        _HOSTS + "test_unregistered_client_is_refused",
    ),
    Elsewhere(
        "a server with a certificate of another authority",
        "network",
        "the client breaks the connection off before it says anything",
        _HOSTS + "test_server_of_another_authority_is_refused",
    ),
    Elsewhere(
        "a server with a valid certificate of another host",
        "network",
        "the client breaks the connection off",
        _HOSTS + "test_server_under_another_name_is_refused",
    ),
    Elsewhere(
        "a run, submitted from a machine that is not the server",
        "network",
        "status 403",
        _HOSTS + "test_control_is_refused_over_the_network",
    ),
    Elsewhere(
        "another client's name",
        "client",
        "it may not join: its key was registered under its own",
        _DEPLOYED + "test_a_client_that_claims_anothers_name_is_refused",
    ),
    Elsewhere(
        "a name that is not in the run, or is not registered",
        "client",
        "it may not join",
        _DEPLOYED + "test_a_stranger_may_not_join",
    ),
    Elsewhere(
        "the name of a client that has joined",
        "client",
        "the first keeps it",
        _DEPLOYED + "test_of_two_nodes_with_one_name_the_first_keeps_it",
    ),
    Elsewhere(
        "late and repeated replies",
        "client",
        "thrown away",
        _FAULTS + "test_late_and_repeated_replies_are_thrown_away",
    ),
    Elsewhere(
        "an old state, put back",
        "client",
        "a failed answer: the client refuses or the server does",
        _FAULTS + "test_a_client_with_an_old_state_is_refused",
    ),
    Elsewhere(
        "other settings under a known run's id",
        "server",
        "the client refuses; its state stays with the first",
        _DEPLOYED + "test_another_run_under_a_known_id_is_refused",
    ),
    Elsewhere(
        "sizes of nodes that are no numbers, do not add up, or are megabytes of text",
        "server",
        "the client refuses in one line of at most 300 characters and keeps nothing",
        _DEPLOYED + "test_sizes_of_nodes_that_cannot_be_are_refused_in_few_words",
    ),
    Elsewhere(
        "a run's id that is a path",
        "server",
        "the client refuses and makes no folder",
        _DEPLOYED + "test_a_run_id_that_is_no_id_becomes_no_folder",
    ),
    Elsewhere(
        "a run that does not suit the client",
        "server",
        "the client refuses to join and says which limit",
        _DEPLOYED + "test_a_run_that_does_not_suit_a_client_is_refused_by_it",
    ),
    Elsewhere(
        "a message without fakes, for a run that the client does not know",
        "server",
        "the client answers that it failed, without words of its own",
        _FAULTS + "test_an_unknown_message_is_answered_without_words",
    ),
    Elsewhere(
        "run after run with another seed or other sizes, so that shards are cut anew",
        "server",
        "the client counts the releases of all shards for the whole data set, and "
        "refuses beyond its client_epsilon",
        _AGREED + "test_a_record_is_safe_from_servers_that_cut_the_data_anew",
    ),
    Elsewhere(
        "releases that never were, at joining",
        "client",
        "refused beyond the run's rounds, its selection, and 20 times above the "
        "ledger; within, the run goes on only with --accept-restore",
        _RESTORED + "test_a_client_cannot_claim_more_than_can_be",
    ),
    Elsewhere(
        "a history of the run that is none, or names folders",
        "server",
        "the client refuses and makes no folder",
        _RESTORED + "test_a_malformed_request_to_join_is_refused",
    ),
    Elsewhere(
        "start after start, each with an abandoned round",
        "server",
        "the client refuses once the states of 16 starts are set aside",
        _RESTORED + "test_a_server_cannot_fill_a_clients_disk_with_states_set_aside",
    ),
    Elsewhere(
        "a run without noise or with seeded noise, for a client that sets no limits",
        "server",
        "the client refuses to join and says which limit",
        _AGREED + "test_a_client_that_says_nothing_answers_neither_without_noise_nor_"
        "with_seeded",
    ),
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
        name = other.test.removeprefix("tests/")
        lines.append(
            f"| {next(number)} | {other.peer} | {other.what} | {other.outcome} "
            f"(`{name}`) |"
        )
    return "\n".join(lines) + "\n"
