from lab.bench.gpu.cli import main

main()
