"""A load generator for any server of the OpenAI API: what `octavo bench serve` runs.

``datasets`` and ``traces`` say what is asked, ``arrivals`` when, ``vocabulary`` in which tokens;
``client`` and ``stream`` ask it, ``run`` keeps to the schedule, ``metrics`` and ``report`` say what
came of it. Names and definitions are those of ``vllm bench serve``; what differs is in
`report.DEFINITIONS`.
"""
