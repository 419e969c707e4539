"""Messages between a scheduler and its agents. Typed, versioned, in columns instead of rows: one message per step and receiver.

    to_agent        scheduler -> agent     Load Drop   Open Close   Go Gone   Receive Settle
    between_agents  agent -> agent         Pass (hidden states)   Want Pages (K and V)   Offer Bid Retract (hops dispatched by agents)
    to_scheduler    agent -> scheduler     Ready   Loaded Refused   Done Lost Verdict Won   Moved Stuck   Report
    membership      between drivers        Peers Halt   Beat Severed   Denial   Meet Unlinked   (state machines never see these)

A sequence is named together with its *epoch*, which grows whenever it is placed anew: the receiver drops what belongs to an older one, so a
late message can do no harm. Columns have one entry per row. Arrays travel beside a message, in the order that it gives. These modules know
no transport; `runtime.transport.wire` turns messages into bytes.
"""

from __future__ import annotations

from runtime.messages.base import PROTOCOL, SCHEDULER, Message
from runtime.messages.between_agents import Bid, Offer, Pages, Pass, Retract, Want
from runtime.messages.membership import Beat, Denial, Halt, Meet, Peers, Severed, Unlinked
from runtime.messages.to_agent import Close, Drop, Go, Gone, Load, Open, Receive, Settle
from runtime.messages.to_scheduler import Done, Loaded, Lost, Moved, Ready, Refused, Report, Stuck, Verdict, Won

ToAgent = Load | Drop | Open | Close | Go | Gone | Receive | Settle | Pass | Want | Pages | Offer | Bid | Retract
ToScheduler = Ready | Loaded | Refused | Done | Lost | Verdict | Won | Moved | Stuck | Report
ToDriver = Peers | Halt | Beat | Severed | Denial | Meet | Unlinked

__all__ = [
    "Beat",
    "Bid",
    "Close",
    "Denial",
    "Done",
    "Drop",
    "Go",
    "Gone",
    "Halt",
    "Load",
    "Loaded",
    "Lost",
    "Meet",
    "Message",
    "Moved",
    "Offer",
    "Open",
    "PROTOCOL",
    "Pages",
    "Pass",
    "Peers",
    "Ready",
    "Receive",
    "Refused",
    "Report",
    "Retract",
    "SCHEDULER",
    "Settle",
    "Severed",
    "Stuck",
    "ToAgent",
    "ToDriver",
    "ToScheduler",
    "Unlinked",
    "Verdict",
    "Want",
    "Won",
]
