"""Messages between a scheduler and its agents. Typed, versioned, in columns instead of rows: one message per step
and receiver.

    to_agent        scheduler -> agent     LoadStages UnloadStages   OpenSequences CloseSequences   RunRows PeerDown
                                                                     StartMigration FinishMigration
    between_agents  agent -> agent         ForwardRows (hidden states)   PageRequest PageData (K and V)   Offer Bid
                                                                         Retract (hops dispatched by agents)
    to_scheduler    agent -> scheduler     AgentHello   StageReady StageLoadFailed   RowsDone RowsLost SpeculationResult
                                                        HopAssigned   MigrationReady MigrationFailed   AgentStats
    membership      between drivers        PeerList Shutdown   Heartbeat PeerDisconnected   Rejected   RendezvousKey
                                                               LinkClosed   (state machines never see these)

A sequence is named together with its *epoch*, which grows whenever it is placed anew: the receiver drops what
belongs to an older one, so a late message can do no harm. Columns have one entry per row. Arrays travel beside a
message, in the order that it gives. These modules know no transport; `runtime.transport.wire` turns messages into
bytes.
"""

from __future__ import annotations

from runtime.messages.base import PROTOCOL, SCHEDULER, Message
from runtime.messages.between_agents import Bid, ForwardRows, Offer, PageData, PageRequest, Retract
from runtime.messages.membership import (
    Heartbeat,
    LinkClosed,
    PeerDisconnected,
    PeerList,
    Rejected,
    RendezvousKey,
    Shutdown,
)
from runtime.messages.to_agent import (
    CloseSequences,
    FinishMigration,
    LoadStages,
    OpenSequences,
    PeerDown,
    RunRows,
    StartMigration,
    UnloadStages,
)
from runtime.messages.to_scheduler import (
    AgentHello,
    AgentStats,
    HopAssigned,
    MigrationFailed,
    MigrationReady,
    RowsDone,
    RowsLost,
    SpeculationResult,
    StageLoadFailed,
    StageReady,
)

ToAgent = (
    LoadStages
    | UnloadStages
    | OpenSequences
    | CloseSequences
    | RunRows
    | PeerDown
    | StartMigration
    | FinishMigration
    | ForwardRows
    | PageRequest
    | PageData
    | Offer
    | Bid
    | Retract
)
ToScheduler = (
    AgentHello
    | StageReady
    | StageLoadFailed
    | RowsDone
    | RowsLost
    | SpeculationResult
    | HopAssigned
    | MigrationReady
    | MigrationFailed
    | AgentStats
)
ToDriver = PeerList | Shutdown | Heartbeat | PeerDisconnected | Rejected | RendezvousKey | LinkClosed

__all__ = [
    "PROTOCOL",
    "SCHEDULER",
    "AgentHello",
    "AgentStats",
    "Bid",
    "CloseSequences",
    "FinishMigration",
    "ForwardRows",
    "Heartbeat",
    "HopAssigned",
    "LinkClosed",
    "LoadStages",
    "Message",
    "MigrationFailed",
    "MigrationReady",
    "Offer",
    "OpenSequences",
    "PageData",
    "PageRequest",
    "PeerDisconnected",
    "PeerDown",
    "PeerList",
    "Rejected",
    "RendezvousKey",
    "Retract",
    "RowsDone",
    "RowsLost",
    "RunRows",
    "Shutdown",
    "SpeculationResult",
    "StageLoadFailed",
    "StageReady",
    "StartMigration",
    "ToAgent",
    "ToDriver",
    "ToScheduler",
    "UnloadStages",
]
