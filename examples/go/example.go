// Calls FusedBatchNormGradV3 on random tensors and compares the result with the formula in double precision.
//
//	example localhost:50051            sends a small batch
//	example unix:PATH 2048             sends a batch of 2048 images
//	example --bad localhost:50051      sends a scale of the wrong length
//	example --ca ca.pem --token-file alice.token gpu1.example:50051
package main

import (
	"context"
	"flag"
	"fmt"
	"math"
	"math/rand"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"bngrad"
	pb "bngrad/v1"
)

const (
	height, width, channels = 8, 8, 16
	epsilon                 = float32(1e-3)
	maxBatch                = 100000
)

type inputs struct{ yBackprop, x, scale, mean, variance []float32 }

type gradients struct{ xBackprop, scaleBackprop, offsetBackprop []float64 }

func uniform(size int, low, high float32) []float32 {
	values := make([]float32, size)
	for i := range values {
		values[i] = low + (high-low)*rand.Float32()
	}
	return values
}

func randomInputs(batch int) inputs {
	size := batch * height * width * channels
	in := inputs{yBackprop: uniform(size, -1, 1), x: uniform(size, -1, 1), scale: uniform(channels, 0.5, 1.5)}
	var sum, sumOfSquares [channels]float64
	for i, x := range in.x {
		sum[i%channels] += float64(x)
		sumOfSquares[i%channels] += float64(x) * float64(x)
	}
	m := float64(size) / channels
	for c := range sum {
		mean := sum[c] / m
		in.mean = append(in.mean, float32(mean))
		in.variance = append(in.variance, float32(sumOfSquares[c]/m-mean*mean))
	}
	return in
}

func expected(in inputs) gradients {
	m := float64(len(in.x)) / channels
	var rstd, sumDyXc [channels]float64
	sumDy, scaleBackprop := make([]float64, channels), make([]float64, channels)
	for i, dy := range in.yBackprop {
		c := i % channels
		sumDy[c] += float64(dy)
		sumDyXc[c] += float64(dy) * (float64(in.x[i]) - float64(in.mean[c]))
	}
	for c := range rstd {
		rstd[c] = 1 / math.Sqrt(float64(in.variance[c])+float64(epsilon))
		scaleBackprop[c] = rstd[c] * sumDyXc[c]
	}
	xBackprop := make([]float64, len(in.x))
	for i, dy := range in.yBackprop {
		c := i % channels
		xc := float64(in.x[i]) - float64(in.mean[c])
		xBackprop[i] = float64(in.scale[c]) * rstd[c] * (float64(dy) - sumDy[c]/m - xc*rstd[c]*rstd[c]*sumDyXc[c]/m)
	}
	return gradients{xBackprop, scaleBackprop, sumDy}
}

func matches(name string, tensor *pb.Tensor, expected []float64, tolerance float64) bool {
	values := bngrad.Values(tensor)
	if len(values) != len(expected) {
		fmt.Fprintln(os.Stderr, name, "has a wrong size")
		return false
	}
	var difference, largest float64
	for i, value := range values {
		difference = math.Max(difference, math.Abs(float64(value)-expected[i]))
		largest = math.Max(largest, math.Abs(expected[i]))
	}
	shape := strings.ReplaceAll(strings.Trim(fmt.Sprint(tensor.Shape), "[]"), " ", ", ")
	fmt.Printf("%s (%s): largest error %.2e of the largest value\n", name, shape, difference/largest)
	return difference <= tolerance*largest
}

func run(target string, options bngrad.Options, batch int, bad bool) error {
	in := randomInputs(batch)
	scale, shape := in.scale, []int64{int64(batch), height, width, channels}
	if bad {
		scale = scale[1:]
	}
	client, err := bngrad.NewClient(target, options)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	eps := epsilon
	response, err := client.FusedBatchNormGradV3(ctx, &pb.FusedBatchNormGradV3Request{
		YBackprop:      bngrad.Tensor(in.yBackprop, shape...),
		X:              bngrad.Tensor(in.x, shape...),
		Scale:          bngrad.Tensor(scale, int64(len(scale))),
		ReserveSpace_1: bngrad.Tensor(in.mean, channels),
		ReserveSpace_2: bngrad.Tensor(in.variance, channels),
		Epsilon:        &eps,
	})
	if err != nil {
		return err
	}
	want := expected(in)
	good := matches("x_backprop", response.XBackprop, want.xBackprop, 2.4e-7)
	good = matches("scale_backprop", response.ScaleBackprop, want.scaleBackprop, 1e-6) && good
	good = matches("offset_backprop", response.OffsetBackprop, want.offsetBackprop, 1e-6) && good
	if !good {
		return fmt.Errorf("the gradients are not those of the formula")
	}
	return nil
}

func explain(err error) {
	if failed, ok := status.FromError(err); ok && failed.Code() != codes.OK {
		fmt.Fprintf(os.Stderr, "%s: %s\n", failed.Code(), failed.Message())
		for _, violation := range bngrad.Violations(err) {
			fmt.Fprintf(os.Stderr, "field %s: %s\n", violation.Field, violation.Description)
		}
		return
	}
	fmt.Fprintln(os.Stderr, err)
}

func main() {
	var options bngrad.Options
	flag.StringVar(&options.CA, "ca", "", "authorities of the server's certificate, for TLS")
	flag.StringVar(&options.Certificate, "certificate", "", "this client's certificate")
	flag.StringVar(&options.Key, "key", "", "this client's key")
	flag.StringVar(&options.TokenFile, "token-file", "", "the token")
	bad := flag.Bool("bad", false, "send a scale of the wrong length")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: example [options] TARGET [BATCH]")
		fmt.Fprintln(os.Stderr, "BATCH is a whole number from 1 to", maxBatch)
		flag.PrintDefaults()
	}
	flag.Parse()
	batch, err := 2, error(nil)
	if flag.NArg() > 1 {
		batch, err = strconv.Atoi(flag.Arg(1))
	}
	if flag.NArg() < 1 || flag.NArg() > 2 || err != nil || batch < 1 || batch > maxBatch {
		flag.Usage()
		os.Exit(2)
	}
	if err := run(flag.Arg(0), options, batch, *bad); err != nil {
		explain(err)
		os.Exit(1)
	}
}
