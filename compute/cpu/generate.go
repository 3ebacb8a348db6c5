package cpu

//go:generate go run -C asm . -kernels dots -pkg cpu -out ../dots_amd64.s -stubs ../dots_amd64.go
//go:generate go run -C asm . -kernels gemv -pkg cpu -out ../gemv_amd64.s -stubs ../gemv_amd64.go
//go:generate go run -C asm . -kernels expand -pkg cpu -out ../expand_amd64.s -stubs ../expand_amd64.go
//go:generate go run -C asm . -kernels elementwise -pkg cpu -out ../elementwise_amd64.s -stubs ../elementwise_amd64.go
