// Judges histories with Porcupine: one history as a line of JSON on the standard input, one word
// of verdict as a line on the standard output. The form of the histories is written by
// ../porcupine.py, and what a database may answer stands in model.go.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"time"

	"github.com/anishathalye/porcupine"
)

// A search that takes longer is given up, and its verdict says so.
const searchMax = 5 * time.Second

type history struct {
	Keys  int    `json:"keys"`
	Calls []call `json:"calls"`
}

// A call without a reply has an unknown outcome.
type call struct {
	Client    int      `json:"client"`
	Began     int64    `json:"began"`
	Ended     int64    `json:"ended"`
	Tests     []test   `json:"tests"`
	Then      []action `json:"then"`
	Refuses   bool     `json:"refuses"` // there is nothing to do when a test fails
	Otherwise []action `json:"otherwise"`
	Reply     *reply   `json:"reply"`
}

type test struct {
	Key    int    `json:"key"`
	Kind   string `json:"kind"` // exists, seq, value
	Wanted bool   `json:"wanted"`
	Seq    uint64 `json:"seq"`
	Value  string `json:"value"` // hexadecimal, as all values
}

type action struct {
	Key   int    `json:"key"`
	Kind  string `json:"kind"` // get, put, delete, add
	Value string `json:"value"`
	Delta int64  `json:"delta"`
}

type reply struct {
	Succeeded   bool     `json:"succeeded"`
	NotACounter bool     `json:"notACounter"`
	Results     []result `json:"results"`
	Seq         uint64   `json:"seq"`      // 0: none was told
	FoundSeq    int64    `json:"foundSeq"` // 0: no value; -1: none was told
}

type result struct {
	Found   bool   `json:"found"`
	Value   string `json:"value"`
	Seq     uint64 `json:"seq"`
	Counter int64  `json:"counter"`
}

func main() {
	if err := judgeAll(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func judgeAll(in io.Reader, out io.Writer) error {
	decoder := json.NewDecoder(bufio.NewReader(in))
	lines := bufio.NewWriter(out)
	for {
		var h history
		if err := decoder.Decode(&h); err == io.EOF {
			return lines.Flush()
		} else if err != nil {
			return err
		}
		fmt.Fprintln(lines, judge(h))
	}
}

func judge(h history) porcupine.CheckResult {
	operations := make([]porcupine.Operation, len(h.Calls))
	for i := range h.Calls {
		each := &h.Calls[i]
		ended := each.Ended
		if each.Reply == nil {
			ended = math.MaxInt64 // it may happen at any time, or never: see stepUnknown
		}
		operations[i] = porcupine.Operation{
			ClientId: each.Client,
			Input:    each,
			Call:     each.Began,
			Output:   each.Reply,
			Return:   ended,
		}
	}
	return porcupine.CheckOperationsTimeout(model(h.Keys), operations, searchMax)
}
