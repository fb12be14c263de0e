"""scripts/bench: this project and llama.cpp on the same model and cores, in alternation in one run.

__main__       the command line
steps          decode, prefill and context: one step of a loaded model, side by side
serving, load  serve and start: real servers under a closed-loop load
sharing        arrival and prefix: chunked prefill and the prefix cache, with and without
builds         what a build takes
shark_worker, llama_worker, stream_worker
               the sides, each a process of its own on given cores, told by `worker` what to run
timing         how a step is timed in such a process, and how much the rest of the machine did
peers, bundles what is measured: llama.cpp built for this CPU, its GGUF files, our bundles
machine        the facts that stand beside every figure
results        what a run leaves, as JSON; tables, page: the same as Markdown
"""
