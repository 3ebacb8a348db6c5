package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// ask puts one question to a frontend over HTTP, as any client would, and shows the answer as it comes
// and what the handoff did for it.
func ask(ctx context.Context, out io.Writer, self selfClient, baseURL, model, question string) error {
	body, err := json.Marshal(map[string]any{
		"model":          model,
		"messages":       []map[string]string{{"role": "user", "content": question}},
		"temperature":    0,
		"max_tokens":     64,
		"stream":         true,
		"stream_options": map[string]bool{"include_usage": true},
		"return_handoff": true,
	})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, baseURL+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	began := time.Now()
	if self.key != "" {
		req.Header.Set("Authorization", "Bearer "+self.key)
	}
	resp, err := cmp.Or(self.client, http.DefaultClient).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<16)) // the status says enough if this fails
		return fmt.Errorf("the first question was answered with %s: %s", resp.Status, strings.TrimSpace(string(text)))
	}
	fmt.Fprintf(out, "\n> %s\n", question)
	a := answer{out: out, began: began}
	if err := a.read(resp.Body); err != nil {
		return err
	}
	a.summary()
	return nil
}

// answer follows one streamed reply.
type answer struct {
	out     io.Writer
	began   time.Time
	first   time.Duration
	usage   askUsage
	handoff *askHandoff
}

type askUsage struct {
	PromptTokens     int `json:"prompt_tokens"`
	CompletionTokens int `json:"completion_tokens"`
}

type askHandoff struct {
	PrefillEngine  string  `json:"prefill_engine"`
	DecodeEngine   string  `json:"decode_engine"`
	PromptComputed int     `json:"prompt_computed"`
	BlocksMoved    int     `json:"blocks_moved"`
	BlocksReused   int     `json:"blocks_reused"`
	BytesMoved     int64   `json:"bytes_moved"`
	PrefillMS      float64 `json:"prefill_ms"`
	TransferMS     float64 `json:"transfer_ms"`
	HandoffMS      float64 `json:"handoff_ms"`
}

type askChunk struct {
	Choices []struct {
		Delta struct {
			Content string `json:"content"`
		} `json:"delta"`
		Handoff *askHandoff `json:"handoff"`
	} `json:"choices"`
	Usage *askUsage `json:"usage"`
	Error *struct {
		Message string `json:"message"`
	} `json:"error"`
}

func (a *answer) read(body io.Reader) error {
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok || data == "[DONE]" {
			continue
		}
		var c askChunk
		if err := json.Unmarshal([]byte(data), &c); err != nil {
			return fmt.Errorf("an event of the answer is not JSON: %w", err)
		}
		if c.Error != nil {
			return fmt.Errorf("the answer broke off: %s", c.Error.Message)
		}
		for _, choice := range c.Choices {
			if choice.Delta.Content != "" && a.first == 0 {
				a.first = time.Since(a.began)
			}
			fmt.Fprint(a.out, choice.Delta.Content)
			if choice.Handoff != nil {
				a.handoff = choice.Handoff
			}
		}
		if c.Usage != nil {
			a.usage = *c.Usage
		}
	}
	return lines.Err()
}

func (a *answer) summary() {
	fmt.Fprintf(a.out, "\n\n  %d prompt tokens, %d generated; first text after %.0f ms, all after %.0f ms\n",
		a.usage.PromptTokens, a.usage.CompletionTokens, milliseconds(a.first), milliseconds(time.Since(a.began)))
	if h := a.handoff; h != nil && h.DecodeEngine != "" {
		fmt.Fprintf(a.out, "  handoff %s -> %s: %d blocks moved (%s), %d reused; copy %.2f ms, request to decode batch %.2f ms\n",
			h.PrefillEngine, h.DecodeEngine, h.BlocksMoved, humanBytes(h.BytesMoved), h.BlocksReused, h.TransferMS, h.HandoffMS)
	}
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func humanBytes(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%d B", n)
}
