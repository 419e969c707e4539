"""Benchmark a server or an engine: workloads, load clients and summaries.

    arrivals, lengths | traces, popularity --> workload --drive--> answers --> summary --> document
                                                          |
                                     HTTP client, or a driver in this process

Everything except the two clients is pure. A workload is a function of its settings and seed, so that two engines get
exactly the same requests.
"""
