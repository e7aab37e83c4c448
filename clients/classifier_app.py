"""The Flower ClientApp of cohort selection: one node is one client.

    query, train    as in `clients.client_app`: the rounds of the classifier
    query.cohort    answers a question of `fedgs.methods.cohort_classifier`

Of an exception the server learns that there was one: type and text may depend on data.
What a client keeps is in Flower's `Context.state`, which leaves no node of a deployment
(a simulation is one machine, which sees everything).
"""

from functools import lru_cache
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app import Error as FlowerError
from flwr.clientapp import ClientApp

from clients import CLIENT_APP_RAISED, client_app
from fedgs.cohorts.selection import read_plan
from fedgs.data.load import load_data
from fedgs.methods.cohort_classifier import Members
from fedgs.round.messages import PAYLOAD_RECORD

OWN = "own"  # what a client keeps

app = ClientApp()
app.query()(client_app.roll_call)
app.train()(client_app.answer)


@lru_cache(maxsize=1)
def members_of(run_folder: str) -> Members:
    """Returns this process's clients, loaded at the first question of a selection.

    Privacy: reads private data; output private.
    """
    config, selection = read_plan(Path(run_folder).parent)
    return Members(config, selection, load_data(config))


@app.query("cohort")
def answer(message: Message, context: Context) -> Message:
    """Answers a question.

    Privacy: as `Members.answer`.
    """
    client = int(context.node_config[client_app.PARTITION])
    try:
        asked = message.content.config_records[PAYLOAD_RECORD]
        members = members_of(str(asked["run_folder"]))
        # Flower keeps it between questions, and hands it to no other client.
        if OWN not in context.state:
            context.state[OWN] = ConfigRecord({})
        found = members.answer(client, asked, context.state.config_records[OWN])
        content = RecordDict({PAYLOAD_RECORD: ConfigRecord(found)})
        return Message(content, reply_to=message)
    except Exception:
        failure = FlowerError(CLIENT_APP_RAISED, f"client {client} failed")
        return Message(failure, reply_to=message)
