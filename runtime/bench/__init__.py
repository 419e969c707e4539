"""Measuring a server or an engine from outside: what is asked and when, who asks, what the answers come to.

    arrivals, lengths | traces, popularity --> workload --drive--> answers --> summary --> document
                                                          |
                                     a client over HTTP, or a driver in this process

All but the two clients is pure, and a workload is a function of its settings and its seed, so that two engines get the
very same requests.
"""
