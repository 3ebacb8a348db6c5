package doctor

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"regexp"
	"strings"
)

// readBaton reads a frontend's or an engine's own words.
func (s *Server) readBaton(health *answer) {
	if s.Role == RoleRelay {
		return
	}
	if role := text(s.info["role"]); role != "" { // an engine
		s.Role = role
		if role == "both" {
			s.Role = RoleWhole
		}
		s.Connector = text(s.info["transport"])
		s.Version = strings.TrimPrefix(text(s.info["version"]), "baton ")
		s.Note = text(s.info["shard"])
		return
	}
	s.Role = RoleFrontend
	var h struct {
		Engines map[string]int `json:"engines"`
	}
	if json.Unmarshal(health.body, &h) != nil {
		return
	}
	var parts []string
	for _, role := range []string{RolePrefill, RoleDecode, "both"} {
		if n := h.Engines[role]; n > 0 {
			parts = append(parts, plural(n, role+" engine"))
		}
	}
	s.Note = strings.Join(parts, ", ")
}

// readVLLM reads the configuration, which a server shows only in development mode, and what its metrics give away.
func (s *Server) readVLLM() {
	connector, role := vllmConnector(s.info["vllm_config"])
	s.kvRole = role
	switch {
	case connector == "" && s.metrics.has("vllm:nixl_"):
		connector = "NixlConnector"
	case connector == "" && s.metrics.has("vllm:mooncake_"):
		connector = "MooncakeConnector"
	}
	s.Connector = connector
	switch role {
	case "kv_producer":
		s.Role = RolePrefill
	case "kv_consumer":
		s.Role = RoleDecode
	case "kv_both":
		s.Role = RoleEither
	default:
		if connector != "" {
			s.Role = RoleEither
		}
	}
	if strings.EqualFold(s.metrics.label("vllm:cache_config_info", "enable_prefix_caching"), "false") {
		s.caching = "off"
	}
}

var (
	vllmConnectorText = regexp.MustCompile(`kv_connector='([A-Za-z0-9_]{1,64})'`)
	vllmRoleText      = regexp.MustCompile(`kv_role='(kv_[a-z]{1,16})'`)
)

// vllmConnector finds kv_transfer_config in vllm_config: an object, or in older versions the text of one.
func vllmConnector(config jsontext.Value) (connector, role string) {
	var object struct {
		Transfer struct {
			Connector jsontext.Value `json:"kv_connector"`
			Role      jsontext.Value `json:"kv_role"`
		} `json:"kv_transfer_config"`
	}
	if json.Unmarshal(config, &object) == nil {
		return text(object.Transfer.Connector), text(object.Transfer.Role)
	}
	var plain string
	if json.Unmarshal(config, &plain) != nil {
		return "", ""
	}
	if m := vllmConnectorText.FindStringSubmatch(plain); m != nil {
		connector = m[1]
	}
	if m := vllmRoleText.FindStringSubmatch(plain); m != nil {
		role = m[1]
	}
	return connector, role
}

// readSGLang reads the server's arguments.
func (s *Server) readSGLang() {
	info := s.info
	var nested map[string]jsontext.Value
	if json.Unmarshal(info["server_args"], &nested) == nil && nested["disaggregation_mode"] != nil {
		info = nested
	}
	if v := text(s.info["version"]); v != "" {
		s.Version = v
	}
	if n := count(info["context_length"]); n > 0 {
		s.Context = n
	}
	if s.Model == "" {
		s.Model = text(info["served_model_name"])
	}
	switch mode := text(info["disaggregation_mode"]); mode {
	case RolePrefill, RoleDecode:
		s.Role = mode
		s.Connector = text(info["disaggregation_transfer_backend"])
		s.bootstrap = count(info["disaggregation_bootstrap_port"])
	}
	if string(info["disable_radix_cache"]) == "true" && s.Role != RoleDecode {
		s.caching = "off"
	}
	if string(info["enable_cache_report"]) == "false" {
		s.reports = "off"
	}
}

// readTRTLLM reads disaggregated_params, which a worker with a cache transceiver fills.
func (s *Server) readTRTLLM() {
	var params map[string]jsontext.Value
	if json.Unmarshal(s.info["disaggregated_params"], &params) != nil || len(params) == 0 {
		return
	}
	s.Role = RoleEither
	s.Connector = "cache transceiver"
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return itoa(n) + " " + what + "s"
}
