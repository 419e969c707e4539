"""Define the messages between a scheduler, its agents and their drivers.

    to_agent        scheduler -> agent     LoadStages UnloadStages   OpenSequences CloseSequences   RunRows PeerDown
                                                                     StartMigration FinishMigration   DropStates
                                                                     SaveSequences   ReadAhead   SendAway
                                                                     EndLoan   MendPages
    between_agents  agent -> agent         ForwardRows (hidden states)   PageRequest PageData (K and V)   Offer Bid
                                                                         Retract (hops dispatched by agents)
                                                                         AttendLoans LoansAttended (side link)
    to_scheduler    agent -> scheduler     AgentHello   StageReady StageLoadFailed HostWeights   RowsDone RowsLost
                                           LengthsProbed   SpeculationResult HopAssigned   MigrationReady
                                           MigrationFailed   AgentStats
    to_pool         agent -> pool          PoolBeat
    membership      between drivers        PeerList Shutdown   Heartbeat PeerDisconnected   Rejected   RendezvousKey
                                                               LinkClosed   (state machines never receive these)

Messages are typed and versioned (`PROTOCOL`). They hold columns, one entry per row; a step sends one message per
receiver.

A sequence is always named together with its *epoch*, which grows each time the sequence is placed anew. The receiver
drops messages of an older epoch, so a late message does no harm.

Arrays travel beside a message, in the order that the message gives. These modules do not depend on a transport;
`runtime.transport.wire` encodes messages to bytes.
"""

from __future__ import annotations

from runtime.messages.base import PROTOCOL, SCHEDULER, Message
from runtime.messages.between_agents import (
    AttendLoans,
    Bid,
    ForwardRows,
    LoansAttended,
    Offer,
    PageData,
    PageRequest,
    Retract,
)
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
    DropStates,
    EndLoan,
    FinishMigration,
    LoadStages,
    LostLayers,
    MendPages,
    OpenSequences,
    PeerDown,
    PromptEntry,
    PromptSave,
    ReadAhead,
    RunRows,
    SaveSequences,
    SendAway,
    StartMigration,
    UnloadStages,
)
from runtime.messages.to_pool import PoolBeat
from runtime.messages.to_scheduler import (
    AgentHello,
    AgentStats,
    HopAssigned,
    HostWeights,
    LengthsProbed,
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
    | ReadAhead
    | UnloadStages
    | OpenSequences
    | CloseSequences
    | SaveSequences
    | SendAway
    | EndLoan
    | MendPages
    | DropStates
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
    | HostWeights
    | RowsDone
    | RowsLost
    | LengthsProbed
    | SpeculationResult
    | HopAssigned
    | MigrationReady
    | MigrationFailed
    | AgentStats
)
ToDriver = (
    PeerList
    | Shutdown
    | Heartbeat
    | PeerDisconnected
    | Rejected
    | RendezvousKey
    | LinkClosed
    | AttendLoans
    | LoansAttended
    | PoolBeat
)

__all__ = [
    "PROTOCOL",
    "SCHEDULER",
    "AgentHello",
    "AgentStats",
    "AttendLoans",
    "Bid",
    "CloseSequences",
    "DropStates",
    "EndLoan",
    "FinishMigration",
    "ForwardRows",
    "Heartbeat",
    "HopAssigned",
    "HostWeights",
    "LengthsProbed",
    "LinkClosed",
    "LoadStages",
    "LoansAttended",
    "LostLayers",
    "MendPages",
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
    "PoolBeat",
    "PromptEntry",
    "PromptSave",
    "ReadAhead",
    "Rejected",
    "RendezvousKey",
    "Retract",
    "RowsDone",
    "RowsLost",
    "RunRows",
    "SaveSequences",
    "SendAway",
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
